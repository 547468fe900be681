"""Train a draft model for any main model, by distillation from text that the main model generates."""
