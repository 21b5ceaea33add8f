"""HTTP: the public port that validators use and the operator's own."""
