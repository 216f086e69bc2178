"""`imagefleet model`, `lora` and `embedding`: what workers read from the storage."""
