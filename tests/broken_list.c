/* A list whose invariant does not hold, shown to its check: a debug build must stop here, any other walks past. */
#include "owners.h"

int main(void) {
    owner_list list = {.count = 1};
    owner_list_check(&list);
    return 0;
}
