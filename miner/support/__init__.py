"""Small tools without knowledge of jobs: clock, rate limits, child processes, addresses."""
