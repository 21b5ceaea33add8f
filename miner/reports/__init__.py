"""Reports of a day, week or month: work done, its worth, GPU time and quality."""
