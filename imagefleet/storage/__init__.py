"""The job queue and the blob store: two protocols, each implemented locally and on Azure."""
