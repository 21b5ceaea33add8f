"""`python -m trainer.native`: one process of a native training."""

from trainer.native.train import main

main()
