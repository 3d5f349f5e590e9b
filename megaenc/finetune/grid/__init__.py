"""`megaenc finetune grid`: models x data sets x learning rates x seeds, in a pool of processes or on Slurm."""
