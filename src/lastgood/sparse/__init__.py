"""Training over slow links (StellaTrain): a small part of each gradient is sent, and a sparse optimizer applies it."""
