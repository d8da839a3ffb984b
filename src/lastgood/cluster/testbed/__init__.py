"""Several hosts inside one machine."""
