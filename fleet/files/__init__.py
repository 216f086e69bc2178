"""`imagefleet model` and `imagefleet lora`: checkpoints and LoRAs in the storage."""
