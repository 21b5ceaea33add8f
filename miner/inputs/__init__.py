"""The inputs of a job: its dataset, checked and profiled, and its base model.

`fetch.JobInputs` is the entry. Each piece of work is done by a process (`worker`): parsing two gigabytes or
hashing twenty would delay answers to validators, a blocking download can only be ended from outside, and a
hostile file attacks a process that holds nothing.
"""
