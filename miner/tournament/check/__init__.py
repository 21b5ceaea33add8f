"""The rules of admission that can be reproduced here: one finding for each."""
