"""From checkpoint tensors to engine parameters: the plan, without any tensor library."""
