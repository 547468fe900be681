"""Estimates of what calls of several tokens take, until they are measured."""

# Calls of several tokens, in calls of one: the geometric mean of models of 0.1 to 1.5B in four types on two
# cores of a Zen 3, and a 13B model on an M2. The loss budget bounds what errors cost, and calls correct them.
CPU_ESTIMATES = {2: 1.2, 4: 1.5, 8: 2.3, 16: 4.2, 32: 7.8, 64: 15.5}
GPU_ESTIMATES = {2: 1.03, 4: 1.08, 8: 1.15, 16: 1.35, 32: 2.2, 64: 3.6}
