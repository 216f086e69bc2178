"""Files of jobs: JSON lines, CSV, text, JSON and Parquet, each but the last compressed or not."""
