"""A new check is a `DoctorCheck` in a module here, and a line in `ALL_CHECKS` of `miner.doctor`."""
