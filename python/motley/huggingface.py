"""A Trainer of transformers that trains by a plan.

    from motley.huggingface import Trainer                         # in the place of transformers'
    Trainer(model=model, args=args, train_dataset=data, cluster="cluster.yaml").train()

started by torchrun with one worker for each device of the cluster. The global batch is per_device_train_batch_size times the number of
workers, as ever; its rows go to the devices as the plan says.
"""

import contextlib

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from ._errors import UserError
from ._wrapped import Wrapped, wrap

_ITEMS = "num_items_in_batch"


@contextlib.contextmanager
def _as_they_were(model):
    """Saving writes into a model's configurations, on rank 0 alone; a step reads them, so they are set back."""
    configs = [getattr(model, name) for name in ("config", "generation_config") if getattr(model, name, None) is not None]
    configs += [value for config in configs for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    before = [(vars(config), dict(vars(config))) for config in configs]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


class Trainer(transformers.Trainer):
    """transformers.Trainer with a cluster, or a plan, and options of motley.distribute."""

    def __init__(self, *arguments, cluster=None, plan=None, distribute=None, **options):
        super().__init__(*arguments, **options)
        if (cluster is None) == (plan is None):
            raise UserError("[distribute] give the Trainer either a cluster or a plan")
        if self.args.fp16 or self.args.bf16:
            raise UserError("[distribute] give distribute={'precision': 'bf16'} in the place of bf16=True or fp16=True")
        self.args.average_tokens_across_devices = False  # every worker counts the whole batch
        self._planned = {"cluster": cluster, "plan": plan, **(distribute or {})}

    def _wrap_model(self, model, training=True, dataloader=None):
        if not training or isinstance(model, Wrapped):
            return model
        return wrap(model, self.optimizer, **self._planned)

    def _makes_loss(self):
        """Whether the loss is made outside of the model."""
        own = type(self).compute_loss is not transformers.Trainer.compute_loss
        return own or self.label_smoother is not None or getattr(self, "compute_loss_func", None) is not None

    def training_step(self, model, *arguments, **options):
        """With whatever compute_loss makes of the model's outputs as a part of the plan."""
        if not isinstance(model, Wrapped) or not self._makes_loss():
            return super().training_step(model, *arguments, **options)
        compute_loss = self.compute_loss

        def loss_of(module, inputs):
            return compute_loss(module, {name: value for name, value in inputs.items() if name != _ITEMS}, **{_ITEMS: inputs.get(_ITEMS)})

        def planned(model, inputs, return_outputs=False, num_items_in_batch=None):
            if num_items_in_batch is not None:
                inputs = {**inputs, _ITEMS: torch.as_tensor(num_items_in_batch)}
            return model(**inputs)["loss"]

        model.loss_of = loss_of
        self.compute_loss = planned
        try:
            return super().training_step(model, *arguments, **options)
        finally:
            del self.compute_loss

    def get_train_dataloader(self):
        """Whole batches, the same on every worker."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size * self.args.world_size,
            sampler=self._get_train_sampler(self.train_dataset),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        return prepare_data_loader(loader, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed)

    def _clip_grad_norm(self, model):
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def _save(self, output_dir=None, state_dict=None):
        wrapped = self.model_wrapped
        if state_dict is None and isinstance(wrapped, Wrapped) and wrapped.dist is not None:
            state_dict = wrapped.state_dict()
        with _as_they_were(self.model):
            super()._save(output_dir, state_dict)
