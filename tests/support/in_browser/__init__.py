"""A headless browser, and a campaign to look at in it."""
