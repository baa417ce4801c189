"""Speed, start-up, memory and logging cost, each measured by one command; see README.md."""
