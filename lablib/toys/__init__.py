"""Each mechanism spelled out with torch.distributed collectives, to be read."""
