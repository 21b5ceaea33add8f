"""Run attempts as local processes, for machines without Docker, such as rented pods."""
