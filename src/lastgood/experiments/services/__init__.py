"""Helper processes that a run starts and ends: Gemini's peers and Checkmate's shadows, and where they run."""
