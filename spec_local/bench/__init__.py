"""Measure speculative decoding on a machine: the library behind `specdec bench`.

prompts     prompts by category, built in or from a file
variants    the settings to compare, plain decoding first
runner      interleaved runs, and the outcome of each prompt
theory      the best possible speed-up of any draft length
figures     ratios with confidence intervals
record      the machine, the build and the model files
conclusions what the figures show, in words
report      Markdown, CSV and JSON
layout      tables and bars that fit a terminal
"""
