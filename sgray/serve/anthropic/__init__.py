"""Anthropic's Messages API over the chat path: bodies become chat calls, answers content blocks. Knows no engine."""
