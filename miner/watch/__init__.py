"""Looking at what runs: progress, standing still."""
