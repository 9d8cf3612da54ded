"""Reading what lies in a checkpoint directory: by workers at any world size, and by programs outside of any job."""
