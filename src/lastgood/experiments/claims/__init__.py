"""The papers' claims, judged against measured tables."""
