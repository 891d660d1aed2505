"""The reduction of gradients in PyTorch. `optimizer_reducer` has the table of its states."""
