"""The extractor of the demo checkpoint's world: the network that says what a picture shows."""
