// The sections of hap_bench.
#pragma once

#include "hap_output.h"

namespace motley::hap {

void ablation(Bench* bench);
void concurrent(Bench* bench);
void experts(Bench* bench);
void heterogeneous(Bench* bench);
void homogeneous(Bench* bench);
void models(Bench* bench);
void search_times(Bench* bench);
void segments(Bench* bench);
void sweep(Bench* bench);

}  // namespace motley::hap
