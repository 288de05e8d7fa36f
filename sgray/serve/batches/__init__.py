"""OpenAI's batch API: files of calls that run in the slack of others, and outlive the process that runs them."""
