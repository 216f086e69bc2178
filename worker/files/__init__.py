"""Files a worker needs: models and LoRAs, fetched, verified and cached."""
