"""The operator's acceptance policies: what a file may say, how it is read, followed and documented."""
