"""The development validator: a validator's client, example tasks, a load generator and the demo.

A test double that users need too, hence part of the package: it talks to any miner, not only to this one.
"""
