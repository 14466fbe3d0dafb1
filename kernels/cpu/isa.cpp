// One instruction set's table of operations. Compiled once a set; the flags say which.
#include <math.h>

#include "attend.h"
#include "attend_many.h"
#include "linear.h"
#include "choose.h"
#include "layer.h"
#include "reduce.h"

#if defined(PD_AVX512BF16)
#define PD_TABLE table_avx512bf16
#define PD_NAME "avx512_bf16"
#elif defined(PD_AVX512)
#define PD_TABLE table_avx512
#define PD_NAME "avx512"
#else
#define PD_TABLE table_avx2
#define PD_NAME "avx2"
#endif

namespace pd {

const Table& PD_TABLE() {
  static constexpr Table table = {
      PD_NAME,
      linear_scratch,
      linear<bf16>,
      linear<float>,
      attend<bf16>,
      attend<float>,
      partial_size,
      attend_many<bf16>,
      attend_many<float>,
      norm<bf16>,
      norm<float>,
      silu<bf16>,
      silu<float>,
      rope<bf16>,
      rope<float>,
      argmax<bf16>,
      argmax<float>,
      race,
      add_up<bf16>,
      add_up<float>,
  };
  return table;
}

}  // namespace pd
