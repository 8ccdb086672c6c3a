#include "zoo/module.h"

#include <c10/core/DefaultDtype.h>

#include "interpret/dispatch.h"

namespace motley {

DefaultDType::DefaultDType(DType dtype) : before_(c10::get_default_dtype()) {
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(to_torch(dtype)));
}

DefaultDType::~DefaultDType() { c10::set_default_dtype(before_); }

DType default_dtype() { return from_torch(c10::get_default_dtype_as_scalartype()); }

#define MOTLEY_MODEL(model, ...) std::shared_ptr<TrainModule> build_##model(const ModelSpec& spec);
#include "zoo/models.inc"
#undef MOTLEY_MODEL

std::shared_ptr<TrainModule> build_model(const ModelSpec& spec) {
#define MOTLEY_MODEL(model, ...) \
  if (spec.name() == model_name(#model)) return build_##model(spec);
#include "zoo/models.inc"
#undef MOTLEY_MODEL
  MOTLEY_CHECK(false, "model {}", spec.name());
}

}  // namespace motley
