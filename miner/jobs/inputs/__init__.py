"""What a job needs before it can train: its dataset, checked and profiled, and its base model.

`fetch.JobInputs` is the way in. The work is done by `worker`, a process of its own for each piece: parsing
two gigabytes or hashing twenty would hold up the answers to validators, a blocking download can only be
ended from outside, and what a hostile file does to a parser is done to a process that holds nothing.
"""
