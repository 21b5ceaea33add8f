"""The development validator: a validator's client, example tasks, a load generator and the demo.

Users need this test double too, hence it is part of the package: it talks to any miner.
"""
