"""Callback that ends a run when its held-out loss is low enough."""

from megaenc.training.callbacks import Callback


class StopAtLoss(Callback):
    """End of a run at the first validation with a loss of at most `loss`.

    The loss is that of `objective`.
    """

    def __init__(self, trainer, loss: float, objective: str = "mlm"):
        super().__init__(trainer)
        self.loss = loss
        self.objective = objective

    def after_validation(self, step, scores):
        loss = scores["objectives"][self.objective]["loss"]
        if loss is not None and loss <= self.loss:
            self.trainer.request_stop(f"stop_at_loss: {loss:.3f}")
