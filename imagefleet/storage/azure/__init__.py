"""Azure Queue Storage and Azure Blob Storage."""
