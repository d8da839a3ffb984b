"""Whether hosts can run a job together: what each of them answers, and which can reach which."""
