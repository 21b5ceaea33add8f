"""The miner's view of its subnet: who is registered, with what stake, at which address."""
