"""Tables as figures and captions."""
