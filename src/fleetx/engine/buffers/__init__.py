"""Keep a model's buffers (BatchNorm statistics, counters) equal on all ranks: which ones are sent, and when."""
