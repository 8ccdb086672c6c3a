// Style and script of the page.
#pragma once

namespace motley::report {

extern const char* const kStyle;
extern const char* const kScript;  // draws the timeline into #timeline from #timeline-data

}  // namespace motley::report
