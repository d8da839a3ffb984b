"""CheckFreq: a copy beside the training, at an interval that is tuned as it runs."""
