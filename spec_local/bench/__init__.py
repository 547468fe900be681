"""Measuring speculation on a machine: what `specdec bench` does, for programs too.

prompts   what is asked: by category, built in or from a file
variants      the settings that are compared, plain decoding first
runner    runs that take turns, and what each prompt brought to light
theory    the best that any length of guesses could have done
figures   ratios with their uncertainty
record    the machine, the build and the model files
report    Markdown, CSV and JSON
"""
