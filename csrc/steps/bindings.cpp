// The Python submodule `steps`. vlora/model/step_recordings.py checks what it takes.
#include <pybind11/pybind11.h>

#include "atmm/segments.h"
#include "attention/attention.h"
#include "steps/recording.h"

namespace py = pybind11;
using namespace vlora;

void bind_steps(py::module_& m) {
  m.doc() = "Recorded kernel calls of decoding steps.";
  py::class_<steps::Recording>(m, "Recording")
      .def(py::init<>())
      .def("begin", &steps::Recording::begin)
      .def("end", &steps::Recording::end)
      .def("__len__", &steps::Recording::size)
      .def_property_readonly("complete", &steps::Recording::complete)
      .def("repeat",
           [](const steps::Recording& recording, const attention::Plan& plan, uintptr_t cosines,
              uintptr_t sines, const atmm::SegmentList& segments, int threads) {
             recording.repeat({threads, &plan, reinterpret_cast<const float*>(cosines),
                               reinterpret_cast<const float*>(sines), &segments});
           });
  m.def("spoil_recording", [] {
    if (steps::Recording* const recording = steps::Recording::current()) recording->spoil();
  });
}
