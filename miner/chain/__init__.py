"""What the miner knows of its subnet: who is registered, with what stake, at which address."""
