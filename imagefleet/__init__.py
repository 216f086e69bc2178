"""What every part shares and what users import: jobs, storage, prices, telemetry. No torch."""
