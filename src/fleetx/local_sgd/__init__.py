"""Average weights instead of reducing gradients: the engine of Local SGD, adaptive Local SGD and DiLoCo."""
