"""`imagefleet serve`: AUTOMATIC1111's and OpenAI's HTTP APIs in front of any storage."""
