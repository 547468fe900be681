"""The process with the models: started, watched, started again; and which models it has."""
