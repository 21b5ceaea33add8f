"""A new check is a `DoctorCheck` in a module here, and a line in `CHECKS` of `miner.doctor`."""
